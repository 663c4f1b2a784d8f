"""ftrain: training that does not care what breaks.

This module imports nothing: the supervisor's processes and every command start from it, and none of them may pay for torch.
"""

__version__ = "0.1.0"
