"""Predicted steps held against measured ones, on bucketings that nothing was calibrated on."""
