"""Between the contract's messages and the engine's values: conversion and the checks that need no state."""
