"""What the formats of this folder share."""
