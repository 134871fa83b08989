() => {
    // Escape cancels the request, as the button does.
    document.addEventListener("keydown", (event) => {
        const button = document.querySelector("#cancel");
        if (event.key === "Escape" && button && button.offsetParent) button.click();
    });
}
