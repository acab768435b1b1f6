"""The two ways in which a refresh or a rollout fails."""


class RefreshError(RuntimeError):
    """A refresh was refused before anything was written: the old version still serves."""


class EngineUnusable(RuntimeError):
    """The engine holds weights of no single version, or its core died in a step: it must be built anew."""
