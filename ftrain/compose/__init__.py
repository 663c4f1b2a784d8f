"""Where storage, recovery and the engine meet."""
