"""The arithmetic of a run before it is started."""
