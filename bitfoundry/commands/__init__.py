"""The commands of ``bitfoundry``, one file per group."""
