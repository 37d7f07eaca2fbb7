"""What is told to the agent in words."""


class Refused(Exception):
    """The call, its files or this machine do not allow the training; the message says why."""
