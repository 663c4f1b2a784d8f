"""The transformer, its initial values, and how its layers are cut into stages."""
