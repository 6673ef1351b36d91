"""The training back ends."""
