"""Batch scripts for a plan: which machine it runs on, what is started there, and the script's text."""
