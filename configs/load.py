"""YAML files and `section.field=value` overrides to a checked `RunConfig`."""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from draftwood.configs.schema import RunConfig

RECIPES = Path(__file__).parent


class ConfigError(ValueError):
    """A key or value the configuration does not know; the message names it and says what would be right."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2 floats: PyYAML reads `3e-4` as text."""


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def recipe_names() -> list[str]:
    """The recipes that ship with the package, by the name `load_config` takes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load_config(source: str | Path | None, overrides: Iterable[str] = ()) -> RunConfig:
    """Reads `source`, a YAML file or the name of a shipped recipe (None: all defaults), and applies `overrides`.

    Raises:
        ConfigError: the file, key or value at fault, what was expected, and the nearest known key.
    """
    values = _read(source) if source is not None else {}
    origin = str(source) if source is not None else "defaults"
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals:
            raise ConfigError(f"override '{item}': expected section.field=value")
        try:
            value = yaml.load(text, _Loader)
        except yaml.YAMLError as error:
            raise ConfigError(f"override '{item}': the value is not YAML: {_one_line(error)}") from None
        _assign(values, key.strip(), value, item)
    return resolve(values, origin)


def resolve(values: dict[str, Any], origin: str = "config") -> RunConfig:
    """Checks a plain nested dict, as a checkpoint holds it, and returns the config."""
    _check_keys(values, RunConfig, origin)
    try:
        return RunConfig.model_validate(_tuples(values))
    except ValidationError as error:
        raise ConfigError(f"{origin}: " + "; ".join(map(_line, error.errors()))) from None


def _line(error: Any) -> str:
    """One mistake, as pydantic tells it; the value is left out where it is a whole section."""
    got = "" if isinstance(error["input"], dict) else f" (got {error['input']!r})"
    message = error["msg"].removeprefix("Value error, ")
    return ": ".join(filter(None, [".".join(map(str, error["loc"])), message])) + got


def _read(source: str | Path) -> dict[str, Any]:
    path = Path(source)
    if not path.suffix and not path.exists():
        path = RECIPES / f"{source}.yaml"
        if not path.exists():
            raise ConfigError(f"no recipe '{source}'; shipped: {', '.join(recipe_names())}; or give a YAML file")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {_one_line(error)}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {type(values).__name__}")
    return values


def _one_line(error: yaml.YAMLError) -> str:
    return " ".join(str(error).split())


def _assign(values: dict[str, Any], key: str, value: Any, item: str) -> None:
    *sections, field = key.split(".")
    for section in sections:
        if isinstance(values, list):  # of stages
            if not section.isdigit() or int(section) >= len(values):
                raise ConfigError(f"override '{item}': expected a number below {len(values)} instead of '{section}'")
            values = values[int(section)]
        else:
            values = values.setdefault(section, {})
        if not isinstance(values, dict | list):
            raise ConfigError(f"override '{item}': '{section}' is not a section")
    if isinstance(values, list):
        raise ConfigError(f"override '{item}': expected {'.'.join(sections)}.<number>.field=value")
    values[field] = value


def _check_keys(values: dict[str, Any], model: type[BaseModel], origin: str, prefix: str = "") -> None:
    for key, value in values.items():
        if key not in model.model_fields:
            known = _all_keys(RunConfig)
            full = f"{prefix}{key}"
            near = difflib.get_close_matches(full, known, 1, 0.5) or difflib.get_close_matches(
                str(key), [k.rsplit(".")[-1] for k in known], 1, 0.6
            )
            if near and near[0] not in known:
                near = [k for k in known if k.endswith(f".{near[0]}")]
            hint = f"; did you mean '{near[0]}'?" if near else f"; known here: {', '.join(model.model_fields)}"
            raise ConfigError(f"{origin}: unknown key '{full}'{hint}")
        annotation = model.model_fields[key].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            if not isinstance(value, dict):
                raise ConfigError(f"{origin}: '{prefix}{key}' is a section, got {value!r}; write {key}.field=value")
            _check_keys(value, annotation, origin, f"{prefix}{key}.")


def _all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(f"{prefix}{name}")
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _all_keys(field.annotation, f"{prefix}{name}.")
    return keys


def _tuples(value: Any) -> Any:
    """YAML has lists only; the fields are tuples, which a strict model does not take a list for."""
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
