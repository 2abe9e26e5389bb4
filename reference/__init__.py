"""What training means, in plain torch: slow, obvious, any float dtype."""
