"""The commands of ``bitfoundry``, a file for each group."""
