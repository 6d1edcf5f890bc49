"""Reads what a job and its machine print: standard errors, logs, tables, dumps of stacks."""
