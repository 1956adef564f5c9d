"""What is learned from calibration text: statistics of inputs, ranges of activations."""
