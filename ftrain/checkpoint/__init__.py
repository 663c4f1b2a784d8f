"""From live training state to boxes in a checkpoint, and back."""
