"""Mixed precision: chooses the scheme of each layer by the loss that quantizing it causes."""
