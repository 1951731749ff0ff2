"""Plugins, one package per inference engine. Nobody imports these but the engine that they are for."""
