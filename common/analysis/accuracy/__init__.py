"""Evaluates the accuracy study: predictions of bucketings that no calibration has seen."""
