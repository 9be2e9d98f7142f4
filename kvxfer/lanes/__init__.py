"""Lanes: how their connections are made and proven, and what each kind promises. The bytes move in the native core."""
