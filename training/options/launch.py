"""Options of `training.launch`."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """Start several workers of a command on this machine."""

    workers: int = 2
    """Number of processes."""
    grace: float = 60.0
    """Seconds that the other workers have to end by themselves after one failed."""
