"""Dropless experts with token counts that stay on the device."""
