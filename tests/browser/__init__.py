"""Tests that drive the real program over a real browser or its API."""
