"""The errors that are reported to the agent."""


class Refused(Exception):
    """The call, its files or this host do not allow the training; the message has the reason."""
