() => {
    const narrow = () => window.innerWidth < 860;
    // Escape cancels the request, as the button does.
    document.addEventListener("keydown", (event) => {
        const button = document.querySelector("#cancel");
        if (event.key === "Escape" && button && button.offsetParent) button.click();
    });
    // On a phone the result is below the button.
    document.addEventListener("click", (event) => {
        if (event.target.closest("#run") && narrow()) {
            document.querySelector("#results").scrollIntoView({ behavior: "smooth" });
        }
    });
}
