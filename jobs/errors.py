"""The one error a user's mistake raises. A traceback is for our bugs only: jobs.cli prints this one plainly."""


class UserError(ValueError):
    """Something the user can put right. The message names the file, row or key, and says what to do."""
