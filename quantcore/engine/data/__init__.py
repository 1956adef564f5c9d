"""Turns texts, chats, images and sound into the inputs of a model."""
