"""The one exception for mistakes that the user can mend."""


class UserError(ValueError):
    """Bad input, told in one line: what is wrong and what to do. Command lines print it without a traceback."""
