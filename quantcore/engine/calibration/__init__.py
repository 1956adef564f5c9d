"""What is learned from calibration text: statistics and ranges."""
