"""Training of text classifiers."""
