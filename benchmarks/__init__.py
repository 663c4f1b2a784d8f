"""What this project claims in numbers, each against its peer in the same run: `python -m benchmarks.NAME --json`."""
