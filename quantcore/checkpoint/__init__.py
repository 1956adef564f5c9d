"""Files of a model on disk: headers, tensors, tokenizer, and the artifact that a job writes. Torch is loaded lazily."""
