"""Whether the stored files are those that the rows name: ``check`` looks, ``watch`` does it slowly while the service
runs, ``fsck`` at once and of everything, for an operator."""
