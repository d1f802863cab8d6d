"""Which rows are held out: by hash, so that the choice survives a reordered or longer file, and by family.

Rows are of one family if their conversations are equal or, with `parts_by_id`, if their ids say that they are parts of
one conversation: ShareGPT stores a long one as `QWJhYvA_0`, `QWJhYvA_17`, ... . A family is never on both sides.
"""

import hashlib
import re

_PART_ID = re.compile(r"([A-Za-z0-9]{7})_\d+")


def choose_validation(
    rows: list[tuple[str, str]], num_validation: int, seed: int, parts_by_id: bool = True
) -> set[int]:
    """Indices of exactly `num_validation` rows to hold out.

    Args:
        rows: (id in the source or "", digest of the conversation) of each row.
    Raises:
        ValueError: too few rows, or no families that add up to the number.
    """
    if not 0 <= num_validation < len(rows):
        raise ValueError(f"num_validation is {num_validation}, but {len(rows)} rows are left and training needs one")
    families = _families(rows, parts_by_id)
    ordered = sorted(families, key=lambda family: rank(seed, min(rows[i][1] for i in family)))
    chosen: set[int] = set()
    for family in ordered:
        if len(chosen) + len(family) <= num_validation:
            chosen.update(family)
    if len(chosen) < num_validation:
        raise ValueError(
            f"no whole families of rows add up to num_validation = {num_validation}: the largest of {len(families)} "
            f"has {max(map(len, families))} rows. Rows are of one family if they are equal or have ids like AbCd123_0, "
            "AbCd123_1: if such ids mean nothing in this source, set parts_by_id=False, else take another number"
        )
    return chosen


def _families(rows: list[tuple[str, str]], parts_by_id: bool) -> list[list[int]]:
    parent = list(range(len(rows)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first_with: dict[str, int] = {}
    for i, (source_id, digest) in enumerate(rows):
        part = _PART_ID.fullmatch(source_id) if parts_by_id else None
        for mark in (digest, f"id {part[1]}" if part else digest):
            parent[find(i)] = find(first_with.setdefault(mark, i))
    families: dict[int, list[int]] = {}
    for i in range(len(rows)):
        families.setdefault(find(i), []).append(i)
    return list(families.values())


def rank(seed: int, digest: str) -> str:
    """By which conversations are put in an order that depends on nothing but themselves and the seed."""
    return hashlib.sha256(f"{seed} {digest}".encode()).hexdigest()
