"""The training loop and what one step is made of."""
