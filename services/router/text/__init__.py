"""Text to tokens and back: tokenizer, chat template, incremental decoding, stop strings."""
