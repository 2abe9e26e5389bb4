"""Open weights in and out: the folders that Hugging Face's libraries read and write."""
