"""The tiers below the device: block files on a drive (native, portable, faulty for tests) and the host arena."""
