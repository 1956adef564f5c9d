"""The worker: a light supervisor around one engine process per job. It never imports torch.

Read ``runner.py`` first: it is one job from its lease to its last row.
"""
