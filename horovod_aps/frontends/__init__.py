"""What frontends share: the compressor's options and state, what reduces its tensors, and how ranks are joined."""
