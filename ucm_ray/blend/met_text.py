"""New text that has been met, to know what comes again."""

from __future__ import annotations

from collections.abc import Iterable

from cachetools import LRUCache

CAPACITY = 1 << 16  # chunks that are remembered
DECAY = 0.9  # of the counts, each time new text is met: the last ten requests or so count
LEAST = 8  # chunks that must have come again before anything is concluded from it


class MetText:
    """Tells whether new text is worth computing for the store at once: because it has come again, or because most new
    text of late has, as in conversations, whose turns stay in the window for a while."""

    def __init__(self) -> None:
        self._came_again: LRUCache[str, bool] = LRUCache(CAPACITY)
        self._num_met = self._num_again = 0.0

    def meet(self, keys: frozenset[str]) -> bool:
        """Take note of the chunks of new text; whether they are worth it."""
        again = keys & self._came_again.keys()
        self.note_reused(again)
        self._num_met = DECAY * self._num_met + len(keys) - len(again)
        self._num_again *= DECAY
        self._came_again.update(dict.fromkeys(keys - again, False))
        return 2 * len(again) >= len(keys) or self._num_again > max(LEAST, self._num_met / 2)

    def note_reused(self, keys: Iterable[str]) -> None:
        """Stored text that is in a prompt again; what was never met does not count."""
        for key in keys:
            if self._came_again.get(key) is False:
                self._came_again[key] = True
                self._num_again += 1

    def clear(self) -> None:
        self._came_again.clear()
        self._num_met = self._num_again = 0.0
