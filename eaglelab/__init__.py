"""Train, compare and run EAGLE, HASS and EAGLE-3 drafters for any Hugging Face causal LM."""

__version__ = "0.1.0"
