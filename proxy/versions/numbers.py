"""Version numbers as people read them."""

from __future__ import annotations

from collections.abc import Collection


def ranges(versions: Collection[int]) -> str:
    """Return versions as text, such as `0, 3 to 7 and 12`. There is at least one."""
    parts: list[list[int]] = []
    for version in sorted(versions):
        if parts and version == parts[-1][-1] + 1:
            parts[-1].append(version)
        else:
            parts.append([version])
    texts = [str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
