"""Objectives: one module for each technique of training, all behind the interface `Objective`."""
