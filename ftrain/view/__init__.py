"""What is shown of finished and live runs: comparisons, grades of predictions, pages."""
