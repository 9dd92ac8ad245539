"""A discrete-event simulation of training steps: pure, without torch. See simulate.py."""
