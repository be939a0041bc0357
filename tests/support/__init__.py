"""What several test files use. Modules of one concern, without tests of their own."""
