"""Checks that the stored files are those that the rows name.

``check`` has the checks, ``watch`` runs them slowly while the service runs, and ``fsck`` runs all of them at once, for
an operator.
"""
