"""The places that start programs by themselves, and which of their entries a snapshot keeps."""
