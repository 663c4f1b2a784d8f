"""The supervisor: every interruption understood, decided on, survived, and accounted for."""
