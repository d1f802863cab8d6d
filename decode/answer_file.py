"""A JSON Lines file that grows by whole lines and can be gone on with: beside it stands what it was begun with."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout


class AnswerFile:
    """One line per answer or conversation, appended and flushed at once. Use it as a context manager.

    Args:
        path: of the lines; the settings are in `<name>.settings.json` beside it.
        settings: what decides the answers. A file that was begun with others is refused.
        keep: what is to be remembered of a line that the file already holds.

    Attributes:
        lines: what `keep` made of these.

    Raises:
        ValueError: other settings (the message has them), a file that was not begun here, a line that is no JSON, or
            another process that writes it.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], keep: Callable[[Any], dict[str, Any]]):
        self.path = path
        self._settings_path = path.with_name(f"{path.name}.settings.json")
        self._settings = json.loads(json.dumps(settings))
        self._keep = keep
        self._lock = FileLock(path.with_name(f".{path.name}.lock"))
        self.lines: list[dict[str, Any]] = []

    def __enter__(self) -> "AnswerFile":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(f"{self.path}: another process is writing it") from None
        try:
            self._check_settings()
            self._repair()
            self.lines = self._read()
            self._settings_path.write_text(json.dumps(self._settings, indent=1) + "\n", encoding="utf-8")
            self._file = self.path.open("a", encoding="utf-8")
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._lock.release()

    def append(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()

    def _check_settings(self) -> None:
        if not self.path.exists() or self.path.stat().st_size == 0:
            return
        if not self._settings_path.exists():
            raise ValueError(f"{self.path} is there and was not begun by this command: choose another file")
        begun = json.loads(self._settings_path.read_text(encoding="utf-8"))
        differing = sorted(key for key in {*begun, *self._settings} if begun.get(key) != self._settings.get(key))
        if differing:
            details = "; ".join(f"{key}: {begun.get(key)} -> {self._settings.get(key)}" for key in differing)
            raise ValueError(
                f"{self.path} was begun with other settings ({details}): undo the change, or choose another file"
            )

    def _repair(self) -> None:
        """Cuts off a last line without an end: the process was killed while it wrote."""
        if not self.path.exists():
            return
        with self.path.open("r+b") as file:
            end = file.seek(0, 2)
            tail = b""
            while end and b"\n" not in tail:
                start = max(0, end - (1 << 16))
                file.seek(start)
                tail = file.read(end - start)
                end = start
            file.truncate(end + tail.rfind(b"\n") + 1)

    def _read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        lines = []
        with self.path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                try:
                    lines.append(self._keep(json.loads(text)))
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"{self.path}, line {number}: not written by this command ({error!r})") from None
        return lines
