"""How long the parts of a run have taken."""

import contextlib
import dataclasses
import time


@dataclasses.dataclass
class Clock:
    """Seconds of a run, over all of its sessions."""

    compile: float = 0.0
    train: float = 0.0
    evaluate: float = 0.0

    @contextlib.contextmanager
    def measuring(self, part: str):
        """Add the time of a block to "compile", "train" or "evaluate", unless it fails."""
        begun = time.perf_counter()
        yield
        setattr(self, part, getattr(self, part) + time.perf_counter() - begun)
