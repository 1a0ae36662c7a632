"""The pure core: a state machine over integers. No clock, no socket, no text, no randomness; time is an argument."""
