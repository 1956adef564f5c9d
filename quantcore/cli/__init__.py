"""The commands of ``python -m quantcore``, and the flags that ``bitfoundry quantize`` shares with it."""
